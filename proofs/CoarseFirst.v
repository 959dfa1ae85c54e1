(** * A coarse mask set first, then double-masking

    If the labels under a small covering set agree, they are the answer; if not, another defense decides. *)

From Coq Require Import List Bool Arith Lia Permutation.
From PatchCleanser Require Import Images RowCertificate DoubleMasking ChallengerMasking.
Import ListNotations.

(** The label on which the coarse labels agree, if they do. *)
Definition coarse_answer (coarse : list label) : option label :=
  match coarse with
  | [] => None
  | first :: _ => if unanimous first coarse then Some first else None
  end.

Definition coarse_first (coarse : list label) (fine : label) : label :=
  match coarse_answer coarse with Some y => y | None => fine end.

Section Soundness.
  Context {pixel value : Type}.
  Variable R : threat pixel.

  Variable coarse_masks : list (region pixel).
  Variable coarse_labels : image pixel value -> table label.
  Hypothesis coarse_visible : function_of_visible coarse_masks coarse_labels.

  Definition answer_of_coarse_first (fine : image pixel value -> label) (x : image pixel value) : label :=
    coarse_first (one_mask_labels coarse_masks coarse_labels x) (fine x).

  (** The coarse masks whose label is right still cover: all that is asked of them. *)
  Definition coarse_certified (x : image pixel value) (y : label) : Prop :=
    forall patch, R patch ->
    exists i, i < length coarse_masks /\ hides (mask coarse_masks i) patch /\ coarse_labels x i i = y.

  Theorem right_coarse_labels_are_enough : forall x y,
    covers coarse_masks R -> (forall l, In l (one_mask_labels coarse_masks coarse_labels x) -> l = y) ->
    coarse_certified x y.
  Proof.
    intros x y Hcovers Hright patch HR. destruct (Hcovers patch HR) as [i [Hi Hhides]].
    exists i. repeat split; [assumption | assumption|]. now apply Hright, every_mask_has_a_label.
  Qed.

  Lemma coarse_labels_agree_on_the_right_one : forall x y l x',
    coarse_certified x y -> attacked R x x' ->
    coarse_answer (one_mask_labels coarse_masks coarse_labels x') = Some l -> l = y.
  Proof.
    intros x y l x' Hcoarse [patch [HR Hsame]] Hanswer.
    destruct (Hcoarse patch HR) as [i [Hi [Hhides Hlabel]]].
    assert (Hin := every_mask_has_a_label coarse_masks coarse_labels x' i Hi).
    rewrite (hidden_patch_changes_no_answer coarse_masks coarse_labels coarse_visible i i patch x x') in Hin
      by assumption.
    rewrite Hlabel in Hin. unfold coarse_answer in Hanswer.
    destruct (one_mask_labels coarse_masks coarse_labels x') as [|first rest]; [discriminate|].
    destruct (unanimous first (first :: rest)) eqn:Hagree; [|discriminate].
    injection Hanswer as <-. symmetry. eapply unanimous_labels_are_equal; eassumption.
  Qed.

  (** The second round may be any defense that keeps the label. *)
  Theorem coarse_first_keeps_the_label : forall fine x y,
    coarse_certified x y -> (forall x', attacked R x x' -> fine x' = y) ->
    forall x', attacked R x x' -> answer_of_coarse_first fine x' = y.
  Proof.
    intros fine x y Hcoarse Hfine x' Hattack. unfold answer_of_coarse_first, coarse_first.
    destruct (coarse_answer _) as [l|] eqn:E; [|now apply Hfine].
    now apply (coarse_labels_agree_on_the_right_one x y l x').
  Qed.

  (** ** With the algorithms of this program: the coarse certificate and the row certificate *)

  Variable masks : list (region pixel).
  Variable labels : image pixel value -> table label.
  Hypothesis visible : function_of_visible masks labels.
  Variable majority : list label -> label.
  Variable order : list nat.
  Hypothesis order_has_every_mask : Permutation order (seq 0 (length masks)).

  Theorem coarse_first_and_row_certified_keeps_the_label : forall x y,
    coarse_certified x y -> row_certified masks labels R x y -> forall x', attacked R x x' ->
    answer_of_coarse_first (answer_of_double_masking masks labels majority order) x' = y /\
    answer_of_coarse_first (answer_of_challenger_masking masks labels order) x' = y.
  Proof.
    intros x y Hcoarse Hcert x' Hattack. split; apply coarse_first_keeps_the_label with (x := x); auto.
    - now apply double_masking_keeps_the_label.
    - now apply challenger_masking_keeps_the_label.
  Qed.
End Soundness.
