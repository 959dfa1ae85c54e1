(** * Minority Reports: detection (core/algorithms.py, reporters and first_failure)

    A classifier answers a label with a confidence. What counts as confident is any test, the same for the alert and
    for the certificate. PatchGuard++ is the same theorem: its pixels are local scores, its masks windows of them. *)

From Coq Require Import List Bool Arith Lia.
From PatchCleanser Require Import Images.
Import ListNotations.

Section MinorityReports.
  Context {confidence : Type}.
  Variable confident : confidence -> bool.

  (** ** The algorithm: masks that contradict the undefended label confidently *)

  Definition reports (undefended : label) (answer : label * confidence) : bool :=
    negb (fst answer =? undefended) && confident (snd answer).

  Definition reporters (undefended : label) (answers : list (label * confidence)) : list nat :=
    filter (fun i => match nth_error answers i with Some a => reports undefended a | None => false end)
      (seq 0 (length answers)).

  Definition alert (undefended : label) (answers : list (label * confidence)) : bool :=
    match reporters undefended answers with [] => false | _ => true end.

  Definition fails (y : label) (answer : label * confidence) : bool :=
    negb (fst answer =? y) || negb (confident (snd answer)).

  (** The number of the first mask whose label is wrong or not confident. *)
  Fixpoint first_failure (y : label) (answers : list (label * confidence)) : option nat :=
    match answers with
    | [] => None
    | a :: rest => if fails y a then Some 0 else option_map S (first_failure y rest)
    end.

  Definition detection_certified (y undefended : label) (answers : list (label * confidence)) : bool :=
    match first_failure y answers with None => undefended =? y | Some _ => false end.

  Lemma alert_if_one_reports : forall undefended answers,
    alert undefended answers = existsb (reports undefended) answers.
  Proof.
    intros undefended answers. unfold alert.
    destruct (reporters undefended answers) as [|i rest] eqn:E; symmetry.
    - apply not_true_iff_false. intro H. apply existsb_exists in H. destruct H as [a [Ha Hreports]].
      apply In_nth_error in Ha. destruct Ha as [i Hi].
      assert (Hin : In i (reporters undefended answers)).
      { apply filter_In. rewrite Hi. split; [|assumption].
        apply in_seq. assert (i < length answers) by (apply nth_error_Some; congruence). lia. }
      rewrite E in Hin. destruct Hin.
    - assert (Hin : In i (reporters undefended answers)) by (rewrite E; now left).
      apply filter_In in Hin. destruct Hin as [_ H]. destruct (nth_error answers i) as [a|] eqn:Hi; [|discriminate].
      apply existsb_exists. exists a. split; [eapply nth_error_In; eassumption | assumption].
  Qed.

  Lemma no_failure_means_all_right : forall y answers,
    first_failure y answers = None <->
    (forall a, In a answers -> fst a = y /\ confident (snd a) = true).
  Proof.
    intros y answers. induction answers as [|a rest IH]; simpl; [split; [tauto|reflexivity]|].
    unfold fails. destruct (Nat.eqb_spec (fst a) y), (confident (snd a)) eqn:Hc; simpl;
      try (split; [discriminate | intro H; destruct (H a (or_introl eq_refl)); congruence]).
    destruct (first_failure y rest); simpl; split; try discriminate; try reflexivity.
    - intro H. enough (Some n = None) by discriminate. apply IH. auto.
    - intros _ b [<-|Hb]; [tauto|]. now apply IH.
  Qed.

  (** ** The theorem *)

  Context {pixel value : Type}.
  Variable masks : list (region pixel).
  Variable labels : image pixel value -> table (label * confidence).
  Hypothesis visible : function_of_visible masks labels.
  Variable R : threat pixel.
  Hypothesis covering : covers masks R.

  (** Of the undefended classifier nothing is assumed. *)
  Variable undefended : image pixel value -> label.

  Definition alarm (x : image pixel value) : bool := alert (undefended x) (one_mask_labels masks labels x).

  Theorem never_silently_wrong : forall x y,
    detection_certified y (undefended x) (one_mask_labels masks labels x) = true ->
    forall x', attacked R x x' -> undefended x' = y \/ alarm x' = true.
  Proof.
    intros x y Hcert x' [patch [HR Hsame]].
    destruct (Nat.eq_dec (undefended x') y) as [|Hwrong]; [now left|right].
    unfold detection_certified in Hcert. destruct (first_failure _ _) eqn:Hnone; [discriminate|].
    rewrite no_failure_means_all_right in Hnone.
    destruct (covering patch HR) as [i [Hi Hhides]].
    destruct (Hnone (labels x i i)) as [Hlabel Hconfident]; [now apply every_mask_has_a_label|].
    unfold alarm. rewrite alert_if_one_reports. apply existsb_exists.
    exists (labels x' i i). split; [now apply every_mask_has_a_label|].
    rewrite (hidden_patch_changes_no_answer masks labels visible i i patch x x') by assumption.
    unfold reports. rewrite Hconfident, Hlabel, andb_true_r. apply negb_true_iff, Nat.eqb_neq. auto.
  Qed.

  Theorem no_alert_on_a_certified_clean_image : forall x y,
    detection_certified y (undefended x) (one_mask_labels masks labels x) = true -> alarm x = false.
  Proof.
    intros x y Hcert. unfold detection_certified in Hcert.
    destruct (first_failure _ _) eqn:Hnone; [discriminate|]. apply Nat.eqb_eq in Hcert.
    rewrite no_failure_means_all_right in Hnone.
    unfold alarm. rewrite alert_if_one_reports. apply not_true_iff_false. intro H.
    apply existsb_exists in H. destruct H as [a [Ha Hreports]]. apply Hnone in Ha.
    unfold reports in Hreports. destruct (Nat.eqb_spec (fst a) (undefended x)); [discriminate|]. intuition congruence.
  Qed.
End MinorityReports.
