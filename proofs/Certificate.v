(** * The certificate of the program (core/algorithms.py, certification_flow)

    The two halves together: the check of Cover.v, run on the masks whose rows of labels are right, makes an image
    row-certified. So what the program prints as certified is what the theorems speak of. *)

From Coq Require Import List Bool Arith Lia Permutation.
From PatchCleanser Require Import Images Geometry Cover RowCertificate DoubleMasking ChallengerMasking.
Import ListNotations.

(** ** What the program computes from the two-mask labels of a clean image, row by row *)

Definition good_masks (y : label) (rows : list (list label)) : list bool := map (unanimous y) rows.

Definition certified (y : label) (rows : list (list label)) : bool := forallb (unanimous y) rows.

Section Certificate.
  Variable masks : list (list window).
  Variable shapes : list shape.
  Variable room : window.
  Variable patches : nat.
  Hypothesis shapes_are_positive : forall s, In s shapes -> 1 <= fst s /\ 1 <= snd s.

  Definition check (chosen : list bool) : bool := cover_check masks shapes room patches chosen.

  Definition all_masks : list bool := repeat true (length masks).

  Definition certificate (y : label) (rows : list (list label)) : bool := check (good_masks y rows).

  (** ** The threat: so many patches, each inside some placement of some shape *)

  Definition patch_of_the_threat (w : window) : Prop := exists v, a_patch shapes room v /\ inside w v.

  Definition threat_of_the_program : threat pixel := fun patch =>
    exists windows, length windows = patches /\ Forall patch_of_the_threat windows /\
      forall p, patch p = region_of windows p.

  Definition regions : list (region pixel) := map region_of masks.

  Lemma region_of_a_mask : forall i, i < length masks -> mask regions i = region_of (mask_of masks i).
  Proof.
    intros i Hi. unfold mask, regions, mask_of.
    rewrite nth_indep with (d' := region_of []) by now rewrite map_length. apply map_nth.
  Qed.

  Lemma accepted_masks_hide_every_patch : forall chosen, check chosen = true ->
    forall patch, threat_of_the_program patch ->
    exists i, i < length masks /\ entry chosen i = true /\ hides (mask regions i) patch.
  Proof.
    intros chosen Hcheck patch [windows [Hlength [Hpatches Hpatch]]].
    assert (Hlarger : exists larger, length larger = patches /\ Forall (a_patch shapes room) larger /\
      forall w, In w windows -> exists v, In v larger /\ inside w v).
    { clear Hpatch. revert Hlength. generalize patches as k.
      induction Hpatches as [|w rest [v [Hv Hinside]] Hrest IH]; intros k Hk.
      - exists []. repeat split; [assumption | constructor | intros w []].
      - destruct (IH (length rest) eq_refl) as [larger [Hl [Hall Hin]]]. exists (v :: larger).
        split; [simpl in *; lia|]. split; [now constructor|].
        intros u [<-|Hu]; [exists v; split; [now left|assumption]|].
        destruct (Hin u Hu) as [t [Ht Ht']]. exists t. split; [now right|assumption]. }
    destruct Hlarger as [larger [Hl [Hall Hin]]].
    assert (H := cover_check_is_exact masks shapes room patches chosen shapes_are_positive).
    destruct H as [H _]. destruct (H Hcheck larger Hl Hall) as [i [Hi [Hchosen Hhides]]].
    exists i. repeat split; [assumption|assumption|]. rewrite region_of_a_mask by assumption.
    intros p Hp. rewrite Hpatch in Hp. apply region_of_iff in Hp. destruct Hp as [w [Hw Hp]].
    destruct (Hin w Hw) as [v [Hv Hinside]]. apply (Hhides v Hv).
    apply (a_window_hides_what_is_inside w v Hinside), region_of_iff. exists w. split; [now left | assumption].
  Qed.

  Theorem an_accepted_mask_set_covers : check all_masks = true -> covers regions threat_of_the_program.
  Proof.
    intros Hcheck patch Hpatch. destruct (accepted_masks_hide_every_patch _ Hcheck patch Hpatch) as [i [Hi [_ H]]].
    exists i. split; [unfold regions; now rewrite map_length | assumption].
  Qed.

  (** ** The theorem *)

  Context {value : Type}.
  Variable F : masked_classifier pixel value label.
  Hypothesis visible : function_of_visible F.

  Definition rows_of (x : image pixel value) : list (list label) :=
    map (row_labels F regions x) (seq 0 (length masks)).

  Lemma a_good_mask_has_a_good_row : forall x y i,
    i < length masks -> entry (good_masks y (rows_of x)) i = true -> good F regions x y i.
  Proof.
    intros x y i Hi Hentry j Hj. unfold entry, good_masks, rows_of in Hentry. rewrite map_map in Hentry.
    rewrite nth_indep with (d' := unanimous y (row_labels F regions x 0)) in Hentry
      by now rewrite map_length, seq_length.
    rewrite map_nth with (f := fun i => unanimous y (row_labels F regions x i)), seq_nth in Hentry by assumption.
    simpl in Hentry. eapply unanimous_labels_are_equal; [exact Hentry|]. now apply row_has_every_pair.
  Qed.

  Theorem the_certificate_means_row_certified : forall x y,
    certificate y (rows_of x) = true -> row_certified F regions threat_of_the_program x y.
  Proof.
    intros x y Hcert patch Hpatch.
    destruct (accepted_masks_hide_every_patch _ Hcert patch Hpatch) as [i [Hi [Hgood Hhides]]].
    exists i. split; [unfold regions; now rewrite map_length|]. split; [assumption|].
    now apply a_good_mask_has_a_good_row.
  Qed.

  (** Two-mask correctness and a covering set give the certificate. *)
  Theorem certified_implies_the_certificate : forall x y,
    check all_masks = true -> certified y (rows_of x) = true -> certificate y (rows_of x) = true.
  Proof.
    intros x y Hcheck Hall. unfold certificate. replace (good_masks y (rows_of x)) with all_masks; [assumption|].
    unfold all_masks, certified, good_masks in *. rewrite forallb_forall in Hall.
    rewrite map_ext_in with (g := fun _ => true) by assumption. unfold rows_of. rewrite map_map.
    assert (H : forall n from, repeat true n = map (fun _ : nat => true) (seq from n)).
    { induction n as [|n IH]; intro from; simpl; [reflexivity|]. now rewrite (IH (S from)). }
    apply H.
  Qed.

  Variable order : list nat.
  Hypothesis order_has_every_mask : Permutation order (seq 0 (length masks)).

  Theorem a_certified_image_keeps_its_label : forall x y,
    certificate y (rows_of x) = true ->
    forall x', attacked threat_of_the_program x x' ->
    answer_of_double_masking F regions majority_label order x' = y /\
    answer_of_challenger_masking F regions order x' = y.
  Proof.
    intros x y Hcert x' Hattack. apply the_certificate_means_row_certified in Hcert.
    assert (Horder : Permutation order (seq 0 (length regions))) by (unfold regions; now rewrite map_length).
    split.
    - now apply double_masking_keeps_the_label with (R := threat_of_the_program) (x := x).
    - now apply challenger_masking_keeps_the_label with (R := threat_of_the_program) (x := x).
  Qed.
End Certificate.
